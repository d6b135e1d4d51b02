//! Reads the complete kernel log from `/dev/kmsg`.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use rustix::io::Errno;

/// Maximum number of records to read, in case the log grows continuously.
const MOST_RECORDS: usize = 200_000;

/// Returns all records as `<level>[seconds] text`, oldest first.
pub fn read_all() -> io::Result<Vec<String>> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut log = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg")?;
    let mut record = vec![0; 8192];
    let mut lines = Vec::new();
    while lines.len() < MOST_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => lines.extend(format_record(&String::from_utf8_lossy(&record[..length]))),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => break,
                // Records were overwritten in the meantime. Continue with the oldest remaining record.
                Some(Errno::PIPE | Errno::INTR) => {}
                _ => return Err(error),
            },
        }
    }
    Ok(lines)
}

/// Formats a record of the form `prefix,sequence,microseconds,flags[,...];text`. Omits all lines after the first line
/// of the text, such as property lines, which begin with a space.
fn format_record(record: &str) -> Option<String> {
    let (header, body) = record.split_once(';')?;
    let mut fields = header.split(',');
    let level = fields.next()?.parse::<u32>().ok()? & 7;
    let microseconds = fields.nth(1)?.parse::<u64>().ok()?;
    let text = body.lines().next().unwrap_or_default();
    Some(format!("<{level}>[{:5}.{:06}] {text}", microseconds / 1_000_000, microseconds % 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_becomes_a_line_with_level_and_time() {
        let record =
            "30,1234,61005001,-;nouveau 0000:00:02.0: NVIDIA GF100\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00:02.0\n";
        assert_eq!(format_record(record).as_deref(), Some("<6>[   61.005001] nouveau 0000:00:02.0: NVIDIA GF100"));
        assert_eq!(format_record("garbage"), None);
        assert_eq!(format_record("x,1,2,-;text"), None);
    }
}
