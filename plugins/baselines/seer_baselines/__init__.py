"""What others do, as plug-ins to compare with."""
