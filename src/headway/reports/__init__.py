"""Reports: what a run directory tells about its run. Reading only: no lock, no file written, a run may be going on."""
