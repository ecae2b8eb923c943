"""`kvtier serve`: an OpenAI-compatible HTTP server over the native worker.

    command   options, the model, the process: start, serve, stop
    app       routes, limits, request ids, the access log
    schema    what a request may say, and how it is refused
    prompts   messages and texts to tokens
    bridge    from the worker's thread to the event loop, and how much may wait
    text      tokens to text, as they come: whole characters, stop strings
    answers   what a response looks like, whole or streamed

An HTTP request is read by `schema`, made tokens by `prompts`, submitted by `bridge`, turned into text by `text` and
written by `answers`. Importing this package imports neither torch nor the web framework.
"""
