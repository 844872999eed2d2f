"""Support for the tests of all distributions: waits, virtual time, ports."""
