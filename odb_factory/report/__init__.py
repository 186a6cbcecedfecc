"""`odb-factory report`: what a run has written, as figures and as one HTML page."""
