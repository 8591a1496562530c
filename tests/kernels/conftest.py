"""EMULATED_TILES=1 in the environment runs the CPU kernels on emulated AMX."""

from tests.kernels import emulated_tiles

emulated_tiles.use_if_asked()
