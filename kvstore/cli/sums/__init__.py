"""The sums beside `kvstore break-even`: one command a file. Each reads its numbers (inputs.py), asks kvstore.calculator, and
hands a Report to kvstore.cli.output."""
