"""tinylm serve: an OpenAI-compatible server for a model."""

import time

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions
from tinylm.commands.sample_options import QuantizeOption
from tinylm.serving.server_config import ServerConfig

EXAMPLES = """Examples:

tinylm serve -m checkpoints/helper
    A server for other programs, and a page for the browser at its address.

tinylm serve -m model.gguf --port 9000 --parallel 16
    Answer 16 requests at the same time on another port.

TINYLM_SERVE_API_KEY=secret tinylm serve --host 0.0.0.0
    Let other machines use it, with a key.
"""


@with_option_groups
def serve(
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: ServerConfig,
    quantize: QuantizeOption = "none",
    output: OutputOptions,
) -> None:
    """Serve a model to other programs (OpenAI's API) and to the browser. Ctrl-C ends the server."""
    from tinylm.models.load import open_for_serving
    from tinylm.serving.server import start_server
    from tinylm.system.process_signals import WAIT_SECONDS, end_at_next_signal

    console = output.console()
    name, converted, open_torch = open_for_serving(model, adapters=adapter or (), quantize=quantize, reporter=console)
    end_at_next_signal()
    server = start_server(name, converted, open_torch, options)
    if console.as_json:
        console.record({"url": server.listening_address})
    else:
        console.result(server.listening_address)
    if converted.config.tokenizer.chat_template is None:
        console.note("The model has no chat template: it continues texts (/v1/completions, and the page).")
    console.note(f"Serving {name}; Ctrl-C ends.")
    while True:
        time.sleep(WAIT_SECONDS)
