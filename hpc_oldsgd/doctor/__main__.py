"""mpirun -n N python -m hpc_oldsgd.doctor"""

from .. import cli
from .examine import Options, main

if __name__ == "__main__":
    cli.run(main, Options, prog="hpc_oldsgd.doctor")
