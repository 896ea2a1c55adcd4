import pytest


@pytest.fixture
def deeprec(sok):
    yield sok.deeprec
    sok.deeprec.uninstall()
