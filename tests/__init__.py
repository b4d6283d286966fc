# SPDX-License-Identifier: Apache-2.0
import os
import sys

# Python keeps what it compiles, whatever the environment says: else every rank of every test compiles all modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
