from fixtures import folder, hosts, slurm  # noqa: F401
