"""Where things lie in the tree that the tests are part of."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
