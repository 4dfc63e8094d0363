"""What octavo measures: each module is one benchmark, results/ what it found."""
