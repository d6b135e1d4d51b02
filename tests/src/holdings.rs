//! Counts a process's kernel resources (descriptors, threads, mappings, memory) to detect leaks.
//!
//! This file uses only the standard library, because tests of other crates include it by its path.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Number of mappings per thread: its stack and its signal stack, each with a guard mapping.
const MAPPINGS_OF_THREAD: usize = 4;

/// A snapshot of a process's resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Number of descriptors, by type.
    pub descriptors: BTreeMap<String, usize>,
    /// Number of threads, by name.
    pub threads: BTreeMap<String, usize>,
    /// Number of mappings of each file, including memory files, by file name.
    pub mapped_files: BTreeMap<String, usize>,
    /// Total number of mappings.
    pub mappings: usize,
    /// Resident memory in KiB, excluding large mappings.
    pub resident_kib: u64,
}

/// Tolerated growth. It is necessary because a process's heap grows and shrinks in steps even without leaks.
#[derive(Clone, Copy, Debug)]
pub struct Slack {
    /// Number of additional mappings, excluding those of new pool threads.
    pub mappings: usize,
    /// Additional resident memory in KiB.
    pub resident_kib: u64,
    /// Name prefixes of pool threads, which start on first use or exit when idle, and therefore do not indicate a leak.
    pub pools: &'static [&'static str],
}

impl Holdings {
    /// Reads the resources of process `pid`. Mappings of at least `large_kib` KiB are not counted as memory, because
    /// they contain a software card's VRAM, which stays resident once touched.
    ///
    /// # Errors
    /// Returns an error if the process does not exist, or the kernel does not permit access.
    pub fn for_process(pid: u32, large_kib: u64) -> io::Result<Self> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        // Skip descriptors that are closed between the two reads.
        let descriptors = entries(&process.join("fd"))?.into_iter().filter_map(|path| fs::read_link(path).ok());
        let descriptors = counted(descriptors.map(|target| kind(&target.to_string_lossy())));
        let names = entries(&process.join("task"))?.into_iter();
        let names = names.filter_map(|path| fs::read_to_string(path.join("comm")).ok());
        let threads = counted(names.map(|name| name.trim().to_owned()));
        let mut holdings = Self { descriptors, threads, ..Self::default() };
        holdings.add_mappings(&fs::read_to_string(process.join("smaps"))?, large_kib);
        Ok(holdings)
    }

    fn add_mappings(&mut self, smaps: &str, large_kib: u64) {
        let mut counts = true;
        for line in smaps.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let number = words.get(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            match words.first() {
                Some(&"Size:") => counts = number < large_kib,
                Some(&"Rss:") if counts => self.resident_kib += number,
                Some(key) if !key.ends_with(':') => {
                    self.mappings += 1;
                    if let Some(name) = words.get(5).filter(|name| name.starts_with('/')) {
                        *self.mapped_files.entry((*name).to_owned()).or_default() += 1;
                    }
                }
                _ => {}
            }
        }
    }

    /// Describes the resources that leaked between this snapshot and `later`. Descriptors, mapped files, and threads
    /// except for pool threads must not grow at all.
    #[must_use]
    pub fn lost(&self, later: &Self, slack: Slack) -> Vec<String> {
        let mut lost = Vec::new();
        let is_pooled = |name: &str| slack.pools.iter().any(|pool| name.starts_with(pool));
        for (what, before, after) in [
            ("descriptors", &self.descriptors, &later.descriptors),
            ("threads", &self.threads, &later.threads),
            ("mapped files", &self.mapped_files, &later.mapped_files),
        ] {
            for name in after.keys() {
                let count = |of: &BTreeMap<String, usize>| of.get(name).copied().unwrap_or(0);
                if count(after) > count(before) && !(what == "threads" && is_pooled(name)) {
                    lost.push(format!("{what}: {name}: {}, were {}", count(after), count(before)));
                }
            }
        }
        let pool =
            |of: &Self| of.threads.iter().filter(|(name, _)| is_pooled(name)).map(|(_, count)| count).sum::<usize>();
        let of_pool = MAPPINGS_OF_THREAD * pool(later).saturating_sub(pool(self));
        if later.mappings > self.mappings.saturating_add(slack.mappings).saturating_add(of_pool) {
            lost.push(format!("mappings: {}, were {}", later.mappings, self.mappings));
        }
        if later.resident_kib > self.resident_kib.saturating_add(slack.resident_kib) {
            lost.push(format!("memory: {} KiB, were {}", later.resident_kib, self.resident_kib));
        }
        lost
    }
}

impl std::fmt::Display for Holdings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sum = |counts: &BTreeMap<String, usize>| counts.values().sum::<usize>();
        let (descriptors, threads) = (sum(&self.descriptors), sum(&self.threads));
        let Self { mappings, resident_kib, .. } = self;
        write!(f, "{descriptors} descriptors, {threads} threads, {mappings} mappings, {resident_kib} KiB")
    }
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

fn counted(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    names.for_each(|name| *counts.entry(name).or_default() += 1);
    counts
}

/// Returns the type of a descriptor: its target, excluding the number of a socket or pipe.
fn kind(target: &str) -> String {
    let numbered = ["socket", "pipe"].iter().find(|kind| target.starts_with(&format!("{kind}:[")));
    numbered.map_or(target, |kind| *kind).to_owned()
}

/// Reads a number from an environment variable. Returns the default if the variable is not set.
///
/// # Panics
/// Panics if the variable is not a number.
#[must_use]
pub fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaked_descriptor_of_process_is_reported() {
        let strict = Slack { mappings: usize::MAX, resident_kib: u64::MAX, pools: &[] };
        let own = std::process::id();
        let before = Holdings::for_process(own, u64::MAX).unwrap();
        let file = fs::File::open("/dev/zero").unwrap();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("lost-one".into()).spawn(move || wait.recv()).unwrap();
        let after = Holdings::for_process(own, u64::MAX).unwrap();
        let lost = before.lost(&after, strict).join("\n");
        assert!(lost.contains("descriptors: /dev/zero: 1, were 0"), "{lost}");
        assert!(after.descriptors.values().sum::<usize>() > 3 && after.resident_kib > 100, "{after}");
        drop((end, file));
        let _ = thread.join().unwrap();
    }

    #[test]
    fn smaps_are_read_by_mapping() {
        let smaps = "55aa-55bb r-xp 00000000 fd:00 123 /usr/bin/thing\nSize: 8 kB\nRss: 4 kB\nVmFlags: rd ex\n\
                     7f00-7f80 rw-p 00000000 00:00 0\nSize: 4096 kB\nRss: 4000 kB\n\
                     7f90-7f91 rw-s 00000000 00:01 7 /memfd:guest-memory (deleted)\nSize: 64 kB\nRss: 16 kB\n";
        let mut holdings = Holdings::default();
        holdings.add_mappings(smaps, 4096);
        assert_eq!((holdings.mappings, holdings.resident_kib), (3, 20));
        let names: Vec<_> = holdings.mapped_files.keys().map(String::as_str).collect();
        assert_eq!(names, ["/memfd:guest-memory", "/usr/bin/thing"]);
        let less = Holdings { mappings: 1, resident_kib: 10, ..Holdings::default() };
        let lost = less.lost(&holdings, Slack { mappings: 1, resident_kib: 9, pools: &[] });
        assert_eq!(lost.len(), 4, "{lost:?}");
    }
}
