"""`kvstore bench`: drives any OpenAI-compatible server with a workload, and says how it did.

workload, trace, prompts   what is asked: conversations made of pieces; equal pieces are equal text
arrivals                   when
runner -> http_client -> api, sse      the asking: one Sample for each request, whatever becomes of it
measures -> compare -> report, plot    percentiles, goodput, one server against another

Everything random comes from the seed. Only runner, http_client and incident do I/O.
"""
