"""Tests of the command line name files relative to the repository."""

import pytest


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
