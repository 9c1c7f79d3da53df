"""Prefill on one machine, decode on another: how long the KV is on its way, and how much of that anybody notices.

The KV of n tokens is sent layer by layer: layer i of L is ready after i/L of the prefill, and its share takes
t = bytes/(L B) on the link. If the link is quicker than the prefill (t <= T/L), only the last layer is left to be sent when
the prefill ends; if not, the link falls behind with each layer but the first, which it cannot begin earlier:
    exposed = latency + t + (L - 1) * max(0, t - T/L)
It hides when t <= T/L, which needs B >= bytes/T. A prefill machine that is never idle makes bytes/T each second, so that is
also what its link must sustain; at a lower rate of requests r it is r * bytes.
"""

import math
from typing import NamedTuple

from kvstore.costs import LoadCost


class Transfer(NamedTuple):
    """Of one request over one link."""

    whole_s: float  # if it begins when the prefill has ended
    exposed_s: float  # after the prefill, if layers are sent as they are ready
    hides: bool  # no layer waits for the one before it
    link_share: float  # of the link's time, at the rate asked for
    max_requests_per_s: float  # that the link could take


def transfer(link: LoadCost, nbytes: float, prefill_s: float, num_layers: int, requests_per_s: float) -> Transfer:
    """`nbytes` of KV behind a prefill of `prefill_s`."""
    layer_s = nbytes / num_layers / link.bytes_per_s
    behind_s = max(0.0, layer_s - prefill_s / num_layers)
    return Transfer(
        whole_s=link.load_s(nbytes),
        exposed_s=link.latency_s + layer_s + (num_layers - 1) * behind_s,
        hides=behind_s == 0,
        link_share=requests_per_s * nbytes / link.bytes_per_s,
        max_requests_per_s=link.bytes_per_s / nbytes,
    )


def hiding_bandwidth(nbytes: float, prefill_s: float) -> float:
    """Bytes a second from which the transfer hides behind the prefill, and with which a link keeps up with a prefill machine
    that is never idle."""
    return nbytes / prefill_s if prefill_s > 0 else math.inf
