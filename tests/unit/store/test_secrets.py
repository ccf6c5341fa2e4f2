"""Credentials in addresses: what is masked, what is not, and that a run shows none of them."""

import pytest
from commands import called, train_flags

from ats_jax.config.schema.setting import Table
from ats_jax.store.secrets import masked, masked_values


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("https://me:HUSH@host/x.txt", "https://***@host/x.txt"),
    ("https://me:HU@SH'x@host:80/x.txt", "https://***@host:80/x.txt"),
    ("https://HUSH@host", "https://***@host"),
    ("HTTPS://me:HUSH@host/a@b", "HTTPS://***@host/a@b"),
    ("zip://a::ftp://me:HUSH@host/a.zip", "zip://a::ftp://***@host/a.zip"),
    ("https://h/x?sig=HUSH", "https://h/x?sig=***"),
    ("https://h/x?sv=2022&sig=HUSH%3D&a=b", "https://h/x?sv=2022&sig=***&a=b"),
    ("s3://b/x?X-Amz-Signature=HUSH&b=1", "s3://b/x?X-Amz-Signature=***&b=1"),
    ("https://h/x?token=HUSH#part", "https://h/x?token=***#part"),
    ("https://h/x#access_token=HUSH", "https://h/x#access_token=***"),
    ("https://h/x?api_key=HUSH;Password=HUSH", "https://h/x?api_key=***;Password=***"),
    ("https://h/x?q=HUSHHUSHHUSHHUSHHUSH", "https://h/x?q=***"),
    ("https://h/x?HUSHHUSHHUSHHUSHHUSH", "https://h/x?***"),
    ("az://me:HUSH@host/x", "az://***@host/x"),
    (
      "('https://a:HUSH@h/x', 'https://h/y?sig=HUSH')",
      "('https://***@h/x', 'https://h/y?sig=***')",
    ),
    ("error: http://a:HUSH@h/x cannot be read.", "error: http://***@h/x cannot be read."),
  ],
)
def test_what_is_masked(text, expected):
  assert masked(text) == expected == masked(expected)


@pytest.mark.parametrize(
  "text",
  [
    "https://host/x.txt?download=true&page=2#top",
    "hf://datasets/some/texts@main/a.parquet",
    "abfss://container@account.dfs.core.windows.net/x.txt",
    "gs://bucket/**/*.jsonl and user@host of /a/b?c=d",
    "data/key=value/token_2.txt",
    "",
  ],
)
def test_what_is_left_as_it_is(text):
  assert masked(text) == text


def test_a_structure_of_settings():
  url = "https://a:HUSH@h"
  values = {"a": (url, 1, None), "b": Table(c=(url,)), "d": [{"e": url}]}
  shown = "https://***@h"
  assert masked_values(values) == {"a": (shown, 1, None), "b": {"c": (shown,)}, "d": [{"e": shown}]}


def test_a_run_shows_no_credentials_and_keeps_them_for_its_next_start(tmp_path, monkeypatch):
  workdir = tmp_path / "run"
  address = "memory://me:HUSH@host/a.txt?sig=HUSH"
  settings = (f"data.paths={address}", f"data.cache_dir={tmp_path}/cache")
  result = called("train", *train_flags(workdir, *settings))
  assert "memory://***@host/a.txt?sig=***" in result.error()
  result_of_show = called("config", "show", str(workdir))
  assert "'memory://***@host/a.txt?sig=***'" in result_of_show.out
  files = {p.name: p for p in tmp_path.rglob("*") if p.is_file()}
  assert [name for name, p in files.items() if b"HUSH" in p.read_bytes()] == ["config.json"]
  assert b"***" in files["log.txt"].read_bytes()
  assert files["config.json"].stat().st_mode & 0o777 == 0o600
  for shown in (result, result_of_show):
    assert "HUSH" not in shown.out + shown.err
