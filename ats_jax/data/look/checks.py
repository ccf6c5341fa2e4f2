"""Every record of some files read, and what is wrong with each named; nothing is tokenised."""

from ats_jax.config.schema import DataConfig
from ats_jax.data.text.formats.token_files import token_documents
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import SourceFile
from ats_jax.data.text_format import format_of
from ats_jax.data.tokens.tokenizer import Tokenizer


def check_files(
  files: list[SourceFile], cfg: DataConfig, tokenizer: Tokenizer | None, report: Report
) -> None:
  """Read `files` to the end.

  Args:
    files: from `find_files`.
    cfg: `format` is read.
    tokenizer: that the ids of token files must be of; None = it is not known, and they are lost.
    report: takes all that is wrong.

  Raises:
    ValueError: if a format needs a module that is not installed.
  """
  text_format = format_of(cfg)
  for file in files:
    if file.kind != "tokens" or not text_format.reads_ids:
      for _ in text_format.pieces(file, report):
        pass
    elif tokenizer:
      _check_ids(file, tokenizer, report)
    else:
      detail = "ids need the tokenizer that they were made with: set data.tokenizer"
      report.lost("ids without a tokenizer", file.path, detail)


def _check_ids(file: SourceFile, tokenizer: Tokenizer, report: Report) -> None:
  try:
    token_documents(
      file.path, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id,
      eos_id=tokenizer.eos_id, report=report,
    )  # fmt: skip
  except ValueError as e:
    detail = str(e).removeprefix(f"{file.path}: ").rstrip(".")
    report.lost("unusable token file", file.path, detail)
