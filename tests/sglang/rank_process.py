"""A process with engines in it, told by lines of JSON what to do: ["name", "verb", {arguments}]; answers a line each."""

import json
import logging
import sys

import hicache
import torch

ENGINES = {}
logger = logging.getLogger(__name__)


def open_engine(name, *, layout, backend, extra, group=None, heads=hicache.HEADS, **options):
    if name in ENGINES:
        ENGINES.pop(name).close()
    if group is not None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{group}", rank=options["rank"], world_size=options["num_ranks"]
        )
        options["tp_group"] = torch.distributed.group.WORLD
    ENGINES[name] = hicache.Engine(hicache.host_pool(layout, heads=heads), backend=backend, extra=extra, **options)


def page_bytes(engine, tokens):
    """What the backend has of each page, as hex; None for one that it has not."""
    targets = [engine.pool.get_dummy_flat_data_page() for _ in engine.hashes(tokens)]
    pages = [engine.backend.get(page, target) for page, target in zip(engine.hashes(tokens), targets, strict=True)]
    return [None if page is None else page.view(torch.uint8).numpy().tobytes().hex() for page in pages]


def do(name, verb, arguments):
    if verb == "open":
        return open_engine(name, **arguments)
    engine = ENGINES[name]
    if verb == "page_bytes":
        return page_bytes(engine, **arguments)
    if verb == "close":
        return ENGINES.pop(name).close()
    owner = engine.backend if verb in {"clear", "exists", "batch_exists"} else engine
    return getattr(owner, verb)(**arguments)


def main():
    logging.basicConfig(level=logging.INFO)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            answer = {"answer": do(*json.loads(line))}
        except Exception as err:  # told to the test
            logger.exception("failed")
            answer = {"error": f"{type(err).__name__}: {err}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
