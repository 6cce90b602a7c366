from hosts import hosts, slurm  # noqa: F401
from processes import folder  # noqa: F401
