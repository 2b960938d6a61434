"""The options of the chat template that a request asks for."""

from eesd_dist.errors import RequestError
from serve_app.openai.schema import ChatFields


def chat_options(fields: ChatFields) -> dict[str, object]:
    options = dict(fields.chat_template_kwargs)
    if "tools" in options:
        raise RequestError(
            "tools cannot be given to the chat template: send the field tools",
            param="chat_template_kwargs",
        )
    options["add_generation_prompt"] = fields.add_generation_prompt
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )
        options["continue_final_message"] = True
    return options
