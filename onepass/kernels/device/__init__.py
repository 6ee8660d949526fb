"""Everything that imports the kernel language (CuTe DSL). The host imports these modules only to compile a kernel."""
