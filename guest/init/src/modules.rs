//! Loads kernel modules in a given order, and unloads the card's driver.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::system::{delete_module, finit_module};

/// File that lists the paths of uncompressed modules, one per line, in loading order.
const LIST: &str = "/etc/modules.list";

/// Name of the card's driver, the only module that receives parameters from commands.
pub const DRIVER: &str = "nouveau";

/// Loads every module in the list, with its parameters from the kernel command line (`module.name=value`). The driver
/// also receives `parameters`. Returns one line per module.
pub fn load_all(parameters: &str) -> io::Result<Vec<String>> {
    let list = std::fs::read_to_string(LIST).map_err(|error| named(LIST, &error))?;
    let command_line = std::fs::read_to_string("/proc/cmdline").map_err(|error| named("/proc/cmdline", &error))?;
    let mut lines = Vec::new();
    for path in listed(&list) {
        let mut given = given_to(&module_name(path), &command_line);
        if module_name(path) == DRIVER {
            given = format!("{given} {parameters}");
        }
        let outcome = load(path, given.trim()).map_err(|error| named(path, &error))?;
        lines.push(format!("{} {outcome}", module_name(path)));
    }
    Ok(lines)
}

fn load(path: &str, parameters: &str) -> io::Result<&'static str> {
    let file = File::open(path)?;
    match finit_module(&file, &CString::new(parameters)?, 0) {
        Ok(()) => Ok("loaded"),
        // The module is built in or already loaded.
        Err(Errno::EXIST) => Ok("present"),
        Err(error) => Err(error.into()),
    }
}

/// Unloads a module that is not in use.
pub fn unload(name: &str) -> io::Result<()> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    Ok(delete_module(&CString::new(name)?, nonblocking)?)
}

/// Returns a module's parameters on the kernel command line, as `modprobe` does.
fn given_to(module: &str, command_line: &str) -> String {
    let words = command_line.split_whitespace().filter_map(|word| {
        let (name, parameter) = word.split_once('.')?;
        (name.replace('-', "_") == module).then_some(parameter)
    });
    words.collect::<Vec<_>>().join(" ")
}

fn listed(list: &str) -> impl Iterator<Item = &str> {
    list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn module_name(path: &str) -> String {
    let stem = Path::new(path).file_stem().unwrap_or_default();
    stem.to_string_lossy().replace('-', "_")
}

fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_skips_blanks_and_comments_and_keeps_the_order() {
        let list = "# for 6.1\n/lib/m/drm.ko\n\n  /lib/m/mxm-wmi.ko \n/lib/m/nouveau.ko";
        assert_eq!(listed(list).collect::<Vec<_>>(), ["/lib/m/drm.ko", "/lib/m/mxm-wmi.ko", "/lib/m/nouveau.ko"]);
    }

    #[test]
    fn modules_get_their_command_line_parameters() {
        let line =
            "console=ttyS0 gpu_mediator_pv.naive=1 xgpu_mediator_pv.a=2 gpu-mediator-pv.spin_us=9 nouveau.debug=x";
        assert_eq!(given_to("gpu_mediator_pv", line), "naive=1 spin_us=9");
        assert_eq!(given_to("drm", line), "");
    }

    #[test]
    fn module_names_are_the_kernels() {
        assert_eq!(module_name("/lib/m/mxm-wmi.ko"), "mxm_wmi");
        assert_eq!(module_name("/lib/m/nouveau.ko"), DRIVER);
    }
}
