"""Private symbols of other libraries, one file for each library, each with the reason and the versions it was tried with."""
