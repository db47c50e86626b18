from setuptools import setup
from setuptools.build_meta import *  # noqa: F403

if __name__ == "__main__":
    setup()
