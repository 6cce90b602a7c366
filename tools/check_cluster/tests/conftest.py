from hosts import hosts, slurm  # noqa: F401
from launch import folder  # noqa: F401
