"""Make every process of a run start child processes by the method that `ODB_TEST_START_METHOD` names."""

import multiprocessing
import os

multiprocessing.set_start_method(os.environ["ODB_TEST_START_METHOD"])
