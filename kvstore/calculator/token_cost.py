"""What tokens cost, from what a machine costs and how many it makes.

    $ per million tokens = price per hour / 3600 / tokens per second * 10^6
The price is of all GPUs that make these tokens together, busy or not: at a share u of its time in use, tokens cost 1/u.
"""


def usd_per_million(usd_per_h: float, tokens_per_s: float, *, in_use: float = 1.0) -> float:
    """$ per million tokens (or of whatever else is made `tokens_per_s` times a second)."""
    return usd_per_h / 3600 / (tokens_per_s * in_use) * 1e6


def usd_for(count: float, usd_per_h: float, per_s: float, *, in_use: float = 1.0) -> float:
    """$ for `count` tokens or requests, of which `per_s` are made a second."""
    return count / 1e6 * usd_per_million(usd_per_h, per_s, in_use=in_use)


def computed_tokens(prompt_tokens: float, hit_rate: float) -> float:
    """Of a prompt, those that are computed when the share `hit_rate` comes from a store."""
    return prompt_tokens * (1 - hit_rate)
