"""The included paged-attention engine, small enough to read in an evening. It knows only `engine_connector.protocol`.

The route of a request through the files:

    llm            add_request: text -> token ids (tokenizer, whose tables come from loader), checked, a Sequence made
    scheduler      waiting -> match the own prefix cache (block_manager) -> ask the connector for the rest -> pages for all
                   of it -> wait for the load, or run
    runner         one step: worker side starts loads -> each prefill chunk by itself, all decodes together through model,
                   which calls attention, which writes K and V to pages and reads them back -> sampler -> worker side
                   starts saves and says what finished
    scheduler      full blocks enter the prefix cache; loads that ended let their requests run (from the first block that
                   failed); tokens are appended; requests end, and their pages are free once the connector is done
    llm            tokens -> text -> TokenDelta, and a RequestOutput at the end

    sequence       one request's state          block_manager  pages: held, free, found by hash
    model          the Llama forward pass       attention      paged attention, prefill and decode
    sampler        greedy and sampled tokens    no_store       the connector of an engine without a store
    device         CPU or GPU: which attention (attention, or gpu_attention with Triton), which copies of pages

    api_server     OpenAI's HTTP API: the event loop on one thread, the LLM on another (a package of its own)

The engine computes in fp32 and keeps its pages in 16 bit (float16, closest to fp32; bfloat16 for models whose K or V
exceed 65,504). A page is a stored block byte for byte. What the last bits of a result may depend on is said in model.py
(heights of products), attention.py (order of sums) and scheduler.py (bounds of chunks).
"""
