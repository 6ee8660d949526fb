"""Models of transformers for several files of tests: each by eager attention, and with onepass."""

import pytest


@pytest.fixture(params=["llama", "mistral", "gemma2", "gpt_oss"])
def decoders(request):
    import tiny_transformers as tiny

    from onepass.integrations.transformers import register

    family, extra = tiny.MODELS[request.param]
    return [tiny.make(family, extra, name) for name in ("eager", register())]


@pytest.fixture
def llama4():
    """The first layer sees chunks of 4 keys."""
    import tiny_transformers as tiny

    from onepass.integrations.transformers import register

    return [tiny.make("Llama4Text", tiny.LLAMA4, name, head="Model") for name in ("eager", register())]
