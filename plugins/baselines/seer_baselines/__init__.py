"""Published policies as plug-ins, to compare with."""
