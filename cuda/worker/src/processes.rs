//! Replaces host process IDs in NVML's lists with guest process IDs.
//!
//! NVML lists the workers by their process IDs on the host. A worker's name contains the process ID of its program in
//! the guest, so that the workers of a tenant can identify each other's programs. Processes that are not workers are
//! removed from the lists, because they do not belong to the guest.

use std::fs;

/// First word of the name of a worker.
const NAME: &str = "guest ";

/// Number of words per list entry: the process ID, the process's memory in bytes, and its GPU and compute instances.
const ENTRY_WORDS: usize = 3;

/// Names this thread, which must be the process's main thread, after a guest program.
pub fn name_after(program: u32) {
    // If this fails, lists for the guest lack this program.
    if let Ok(name) = std::ffi::CString::new(format!("{NAME}{program}")) {
        let _ = rustix::thread::set_name(&name);
    }
}

/// Returns the guest process ID in a worker's name.
fn program(name: &str) -> Option<u32> {
    name.strip_prefix(NAME)?.trim_end().parse().ok()
}

/// Returns the guest process ID of a worker on this host.
fn program_of(process: u32) -> Option<u32> {
    program(&fs::read_to_string(format!("/proc/{process}/comm")).ok()?)
}

/// Replaces the process IDs of workers in a list with guest process IDs, and removes all other processes. The list
/// consists of the entry count and the entries.
pub fn translate(results: &mut [u64]) {
    replace(results, program_of);
}

fn replace(results: &mut [u64], program_of: impl Fn(u32) -> Option<u32>) {
    let Some((count, entries)) = results.split_first_mut() else { return };
    let listed = usize::try_from(*count & 0xffff_ffff).unwrap_or_default().min(entries.len() / ENTRY_WORDS);
    let mut own = Vec::new();
    for entry in entries.chunks_exact(ENTRY_WORDS).take(listed) {
        if let [process, bytes, instances] = *entry
            && let Some(program) = program_of(process as u32)
        {
            own.extend([u64::from(program), bytes, instances]);
        }
    }
    *count = (own.len() / ENTRY_WORDS) as u64;
    // Do not reveal other processes of the host to the guest.
    own.resize(entries.len(), 0);
    entries.copy_from_slice(&own);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_workers_get_the_guests_numbers() {
        let mut results = [3, 100, 5, 0, 101, 6, 1, 102, 7, 0, 55, 55, 55];
        replace(&mut results, |process| (process != 101).then_some(process - 90));
        assert_eq!(results, [2, 10, 5, 0, 12, 7, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn longer_count_than_the_list_is_bounded() {
        let mut results = [u64::from(u32::MAX), 100, 5, 0];
        replace(&mut results, Some);
        assert_eq!(results, [1, 100, 5, 0]);
        replace(&mut [], Some);
    }

    #[test]
    fn name_of_a_thread_has_the_program() {
        std::thread::spawn(|| {
            name_after(4_194_304);
            let task = rustix::thread::gettid().as_raw_nonzero();
            let name = fs::read_to_string(format!("/proc/self/task/{task}/comm")).expect("readable");
            assert_eq!(program(&name), Some(4_194_304), "{name}");
        })
        .join()
        .expect("no panic");
        assert_eq!((program("guest"), program("guest x"), program("bash")), (None, None, None));
    }
}
