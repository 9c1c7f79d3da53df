"""The subcommands of `kvstore break-even`: sums people do beside it."""

import click

from kvstore.cli.sums.cost import cost
from kvstore.cli.sums.goodput import goodput
from kvstore.cli.sums.mfu import mfu
from kvstore.cli.sums.plan import plan
from kvstore.cli.sums.quantisation import quantisation
from kvstore.cli.sums.roofline import roofline
from kvstore.cli.sums.speculative import speculative
from kvstore.cli.sums.split import split

COMMANDS: tuple[click.Command, ...] = (plan, quantisation, split, speculative, cost, goodput, mfu, roofline)
