"""Where an epoch stands: kept as optimizer steps are consumed, written as a state, gone on from."""
