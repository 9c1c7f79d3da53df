"""Who a node is to the others. Apart from peer_control.py, which costs an import of grpc."""

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

_PROOF_LABEL = b"kvstore/peer/1\0"


class Identity(NamedTuple):
    """Who we are to other nodes. `instance` is new at each start. `credentials` make a channel secure; None: it is not."""

    node_id: str
    instance: bytes
    secret: bytes
    credentials: Callable[[], Any] | None


def proof(secret: bytes, node_id: str, instance: bytes) -> bytes:
    """By which a node shows that it knows the secret of its cluster (HelloRequest.proof)."""
    return hmac.digest(secret, _PROOF_LABEL + instance + node_id.encode(), sha256) if secret else b""
