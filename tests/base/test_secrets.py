"""One list of what is a credential; texts in every form lose its value and nothing else."""

import json
import shlex
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.sglang.launch.flags import known_flags

SECRET = [
    "--api-key", "--admin-api-key", "--ssl-keyfile-password", "--hf-token", "api_key", "admin_api_key", "auth_token",
    "access_token", "watermark_key", "watermark_key_id", "--watermark-key", "redis_password", "passwd", "secret_key",
    "client_secret", "credentials", "accessToken", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY", "DB_PASSWD", "token", "Authorization", "apiKeys", "$HF_TOKEN", "ssl_keyfile_password",
]  # fmt: skip
NOT_SECRET = [
    "device_tokens", "--max-total-tokens", "tokenizer_path", "--tokenizer-mode", "api_key_env", "--ssl-keyfile",
    "--bucket-time-to-first-token", "bucket_inter_token_latency", "eos_token", "pad_token_id", "bytes_per_token",
    "--prefill-delayer-token-usage-low-watermark", "token_usage", "keys", "hicache_storage_backend", "PATH",
    "num_reserved_decode_tokens", "hf_token_path", "public_key", "model_path", "port",
]  # fmt: skip
VALUE = st.text("abcXYZ0189_-+/=", min_size=8, max_size=24).map(lambda text: "v" + text)


@pytest.mark.parametrize("name", SECRET)
def test_credentials_by_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", NOT_SECRET)
def test_what_only_looks_like_one(name: str) -> None:
    assert not is_secret(name)


def test_sglangs_own_flags() -> None:
    """Every flag that the releases know: three hold a credential."""
    assert {name for name in known_flags() if is_secret(name)} == {
        "--api-key",
        "--admin-api-key",
        "--ssl-keyfile-password",
    }


def _nested(name: str, value: str) -> str:
    return json.dumps({"backend": "redis", name: value, "pages": 64})


FORMS: dict[str, Callable[[str, str], str]] = {
    "flag": lambda name, value: f"launch --{name.replace('_', '-')} {value} --port 30000",
    "flag with =": lambda name, value: f"launch --{name.replace('_', '-')}={value} --port 30000",
    "quoted flag": lambda name, value: f"launch --{name.replace('_', '-')} '{value}' --port 30000",
    "next line": lambda name, value: f"launch --{name.replace('_', '-')} \\\n  {value} --port 30000",
    "argv": lambda name, value: repr(["launch", f"--{name.replace('_', '-')}", value, "--port", "30000"]),
    "yaml argv": lambda name, value: f"args:\n- --{name.replace('_', '-')}\n- {value}\n- --port\n- '30000'\n",
    "yaml": lambda name, value: f"{name}: {value}\nport: 30000\n",
    "variable": lambda name, value: f"export {name.upper()}={value} PORT=30000",
    "json": lambda name, value: json.dumps({"model": "m", name: value, "port": 30000}),
    "python": lambda name, value: f"ServerArgs(model_path='m', {name}={value!r}, port=30000)",
    "dict": lambda name, value: repr({"model": "m", name: value, "port": 30000}),
    "list": lambda name, value: json.dumps({"model": "m", name: [value, {"b": value}], "port": 30000}),
    "json in python": lambda name, value: f"ServerArgs(extra_config={_nested(name, value)!r}, port=30000)",
    "json in json": lambda name, value: json.dumps({"extra_config": _nested(name, value), "port": 30000}),
    "json in json in json": lambda name, value: json.dumps({"a": FORMS["json in json"](name, value), "port": 30000}),
    "json in shell": lambda name, value: f"launch --extra-config {shlex.quote(_nested(name, value))} --port 30000",
    "cut off": lambda name, value: f"port=30000, {name}='{value}",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@given(
    name=st.sampled_from(["api_key", "access_token", "watermark_key", "redis_password", "hf_token", "credentials"]),
    value=VALUE,
)
def test_no_form_keeps_a_value(form: str, name: str, value: str) -> None:
    text = FORMS[form](name, value)
    starred = redact(text)
    assert value not in starred and "***" in starred and "30000" in starred
    assert redact(starred) == starred


@pytest.mark.parametrize("form", FORMS)
@given(name=st.sampled_from(["max_total_tokens", "tokenizer_path", "eos_token", "role"]), value=VALUE)
def test_what_is_not_secret_stays_byte_for_byte(form: str, name: str, value: str) -> None:
    text = FORMS[form](name, value)
    assert redact(text) == text


@given(st.text(alphabet=st.sampled_from("\"'\\{}[](),:= \nkeytoken-$#*")) | st.text())
def test_any_text_is_taken(text: str) -> None:
    redact(text)


@given(VALUE.map(lambda value: value + "\"'\\}])"))
def test_json_stays_json_whatever_the_value_holds(value: str) -> None:
    starred = json.loads(redact(json.dumps({"outer": _nested("api_key", value), "password": [value], "port": 1})))
    assert starred == {"outer": _nested("api_key", "***"), "password": "***", "port": 1}


@pytest.mark.parametrize(
    "text",
    [
        "api_key=None, port=1",
        '{"hf_token": null}',
        "--api-key $SGLANG_API_KEY --port 1",
        '--api-key="${KEY}"',
        "Decode batch, #token: 2048, token usage: 0.02",
        "#cached-token: 5, #new-token: 7",
    ],
)
def test_absent_values_references_and_counts_stay(text: str) -> None:
    assert redact(text) == text


def test_passwords_in_urls_and_headers() -> None:
    assert redact("redis://me:hunter2@host:6379/0") == "redis://me:***@host:6379/0"
    assert redact("Authorization: Bearer abc.def") == "Authorization: ***"


def test_long_texts_take_linear_time() -> None:
    for text in (
        "\\" * 400_000 + "key",
        "a-" * 200_000 + "key",
        "key=[" * 2000,
        "token " * 100_000,
        '"' * 100_001 + "key",
    ):
        redact(text)
