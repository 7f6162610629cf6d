"""The command line, the run spec, the controller and the pools: what puts the system on machines."""
