"""A wheel holds the library alone; an editable install of a checkout also makes ``papers`` and ``bench`` importable."""

from setuptools import setup
from setuptools.command.build_py import build_py


class LibraryOnly(build_py):
    """Leaves out everything but ``sordino`` unless the install is an editable one."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages or () if name.partition(".")[0] == "sordino"]


setup(cmdclass={"build_py": LibraryOnly})
