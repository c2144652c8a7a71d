"""The ScaleRL recipe in JAX: a sharded trainer fed by a fleet of generators, and the fit that forecasts a run."""
