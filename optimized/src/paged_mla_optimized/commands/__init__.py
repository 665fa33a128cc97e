"""The subcommands of ``paged-mla`` that need the kernels."""
