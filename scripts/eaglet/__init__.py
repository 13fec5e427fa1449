"""What eaglet's programs share: one concept per module, none of which knows Snakemake."""

__version__ = "0.1.0"
