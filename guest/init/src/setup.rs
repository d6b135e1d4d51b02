//! Mounts file systems and opens the agent's serial port.

use std::fs::{File, OpenOptions};
use std::io;
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use rustix::termios::{ControlModes, OptionalActions, tcgetattr, tcsetattr};

/// Path of the agent's serial port.
pub const AGENT_LINE: &str = "/dev/ttyS1";

/// Type and mount point of each file system, in mount order.
const MOUNTS: [(&str, &str); 6] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
    ("debugfs", "/sys/kernel/debug"),
];

/// Mounts the guest's file systems. Prints a message for each failure, and continues.
pub fn mount_all() {
    for (kind, directory) in MOUNTS {
        // The mount points in `sysfs` and `debugfs` already exist.
        let _ = std::fs::create_dir_all(directory);
        match mount(kind, directory, kind, MountFlags::empty(), None) {
            // The kernel may already have mounted devtmpfs.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => println!("guest-init: mount {kind} on {directory}: {error}"),
        }
    }
}

/// Returns the value of `name=value` on the kernel command line.
pub fn kernel_parameter(name: &str) -> Option<String> {
    parameter_in(&std::fs::read_to_string("/proc/cmdline").ok()?, name)
}

fn parameter_in(line: &str, name: &str) -> Option<String> {
    line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
}

/// Opens the agent's serial port in raw mode. Retries every second until it succeeds.
pub fn open_agent_line() -> File {
    let mut said = false;
    loop {
        match try_open() {
            Ok(line) => return line,
            Err(error) if !said => println!("guest-init: {AGENT_LINE}: {error}; still trying"),
            Err(_) => {}
        }
        said = true;
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn try_open() -> io::Result<File> {
    let line = OpenOptions::new().read(true).write(true).open(AGENT_LINE)?;
    let mut termios = tcgetattr(&line)?;
    termios.make_raw();
    // Without CLOCAL, the port would hang up when the host closes its end.
    termios.control_modes.insert(ControlModes::CLOCAL | ControlModes::CREAD);
    termios.control_modes.remove(ControlModes::CRTSCTS);
    termios.set_speed(115_200)?;
    tcsetattr(&line, OptionalActions::Now, &termios)?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_is_found_by_its_whole_name() {
        let line = "console=ttyS0 gm.autoload=1 xgm.autoload=2 gm.autoload2=3 quiet\n";
        assert_eq!(parameter_in(line, "gm.autoload").as_deref(), Some("1"));
        assert_eq!(parameter_in(line, "gm.auto"), None);
        assert_eq!(parameter_in(line, "quiet"), None);
    }
}
