//! Lists the libraries of a program, using the dynamic loader.
//!
//! Sources: `ld.so(8)`, in particular `LD_TRACE_LOADED_OBJECTS`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec;

/// A file that is loaded with a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The name requested by the program: a path for the dynamic loader, or a file name for a library.
    pub name: String,
    /// Path of the file on this host.
    pub path: PathBuf,
    /// True for the dynamic loader.
    pub is_loader: bool,
}

impl Library {
    /// Returns the last component of the requested name.
    pub fn file_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }
}

/// Lists the files loaded with the program of `command`, including its dynamic loader. Does not run the program.
pub fn list(command: &mut Command) -> Result<Vec<Library>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let text = exec::probe(command.env("LD_TRACE_LOADED_OBJECTS", "1"));
    let text = text.with_context(|| format!("the dynamic loader does not list the libraries of {program}"))?;
    parse(&text).with_context(|| format!("libraries of {program}"))
}

fn parse(text: &str) -> Result<Vec<Library>> {
    let mut libraries = Vec::new();
    for line in text.lines().map(str::trim) {
        let (name, rest) = line.split_once(" => ").unwrap_or((line, line));
        let path = rest.rsplit_once(" (0x").map_or(rest, |(path, _)| path);
        // A line without a path or an arrow describes an object that the kernel maps, such as the vDSO.
        if Path::new(path).is_absolute() {
            let name = name.rsplit_once(" (0x").map_or(name, |(name, _)| name).to_owned();
            libraries.push(Library { is_loader: name.starts_with('/'), name, path: path.into() });
        } else if line.contains(" => ") {
            bail!("{line}");
        }
    }
    if !libraries.iter().any(|library| library.is_loader) {
        bail!("no dynamic loader in:\n{text}");
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_libraries_of_test_program_exist() {
        let libraries = list(&mut Command::new(std::env::current_exe().unwrap())).unwrap();
        assert!(libraries.iter().any(|library| library.name == "libc.so.6"), "{libraries:?}");
        assert!(libraries.iter().all(|library| library.path.is_file()), "{libraries:?}");
    }

    #[test]
    fn lines_of_the_loader_are_read_with_and_without_an_arrow() {
        let text = "\tlinux-vdso.so.1 (0x00007fed)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f2d)\n\t/lib64/ld.so.2 (0x00007f2e)\n";
        let library = |name: &str, path: &str, is_loader| Library { name: name.into(), path: path.into(), is_loader };
        let expected =
            [library("libc.so.6", "/lib/x/libc.so.6", false), library("/lib64/ld.so.2", "/lib64/ld.so.2", true)];
        assert_eq!(parse(text).unwrap(), expected);
        let moved = parse("\t/lib64/ld.so.2 => /cache/ld.so.2 (0x1)\n").unwrap();
        assert_eq!((moved[0].file_name(), moved[0].path.as_path()), ("ld.so.2", Path::new("/cache/ld.so.2")));
        assert!(parse("\tlibx.so.1 => not found\n").unwrap_err().to_string().contains("libx.so.1"));
        assert!(parse("").is_err());
    }
}
