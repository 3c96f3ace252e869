"""The model card: front matter that parses, no number that was not paid for."""

import json

import pytest
import yaml
from made_up_runs import bound

from dp_jax.statement import model_card, privacy_json


def split_card(card: str) -> tuple[dict, str]:
  _, front, body = card.split("---\n", 2)
  return yaml.safe_load(front), body


def test_public_data_show_the_accuracy(record):
  front, body = split_card(
    model_card.model_card(bound(record, {"split": "test", "accuracy": 0.913}))
  )
  assert front["library_name"] == "dp_jax"
  assert "differential-privacy" in front["tags"]
  assert front["license"] and front["metrics"] == ["accuracy"]
  assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.913
  assert "91.3%" in body
  assert "differential privacy" in body
  assert "does not cover" in body


def test_private_data_show_no_measured_number(facts):
  record = privacy_json.privacy_record(facts(declared="private"))
  evaluation = {"split": "test", "accuracy": 0.7316552}
  with pytest.raises(ValueError, match="release of its own"):
    bound(record, evaluation)
  card = model_card.model_card({**record, "evaluation": evaluation})
  assert "73.2" not in card and "0.7316" not in card
  assert "model-index" not in split_card(card)[0]
  assert "Not shown" in card


def test_test_key_is_not_advertised_as_private(facts):
  record = privacy_json.privacy_record(facts(test_key=True))
  front, body = split_card(model_card.model_card(record))
  assert "differential-privacy" not in front["tags"]
  assert "**Not private: fixed seed.**" in body


@pytest.mark.parametrize("name", ["a: b\n---\nx: y", '"quoted" # c', "<script>", "[x](y)", "| a |"])
def test_names_cannot_break_the_card(record, name):
  card = model_card.model_card(record, dataset_name=name, model_name=name)
  front, body = split_card(card)
  assert front["datasets"] == [" ".join(name.split())]
  assert json.dumps(front)
  assert "<script>" not in body
