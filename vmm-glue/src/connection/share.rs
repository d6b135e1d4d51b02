//! Checks whether a client's memory is really shared.
//!
//! A VMM started without shared memory still passes its memory file, but the guest uses a private copy: the file stays
//! empty, and a device that maps the file reads zeros. The check reads some pages both through a message to the client
//! and from the file. The memory is private if, in two consecutive comparisons of a page, the client's page has data
//! but the file's page is empty. The memory is shared if both pages contain the same data. If the client does not
//! accept requests, only the file is checked: the memory is private if the file has no allocated blocks. The check uses
//! `pread`, because accessing a mapping would fill holes in the file.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::dma::{DmaError, Pending};
use crate::link::Link;
use vmm_memory::memory::{Mapping, MemoryTable, PAGE_SIZE, Sharing};

/// Size of each compared sample in bytes.
const SAMPLE: usize = 4096;
const _: () = assert!(SAMPLE as u64 == PAGE_SIZE);
/// Maximum number of samples per check.
const MAX_SAMPLES: usize = 64;
/// `errno` in QEMU's reply while the guest has bus mastering disabled.
const ENODEV: u32 = 19;
/// Guest physical addresses that firmware or a kernel writes early: interrupt vectors, firmware data, the last page
/// below 1 MiB, and kernel load addresses.
const EARLY_WRITE_ADDRS: [u64; 7] = [0, 0x7000, 0x9_f000, 0xf_f000, 0x10_0000, 0x100_0000, 0x200_0000];
/// Number of equal parts of a region. The check samples the boundaries between the parts, in addition to the last page
/// and [`EARLY_WRITE_ADDRS`].
const PARTS: u64 = 8;

#[derive(Debug)]
struct Sample {
    gpa: u64,
    /// Byte offset in the mapping.
    offset: u64,
    mapping: Arc<Mapping>,
    /// Set if the client's page had data that the file's page lacked.
    struck: bool,
}

/// A check that runs while the server handles messages.
#[derive(Debug, Default)]
pub(super) struct ShareCheck {
    samples: VecDeque<Sample>,
    running: Option<(Pending, Sample)>,
    /// Private memory detected without messages.
    found: Vec<(u64, Arc<Mapping>)>,
}

impl ShareCheck {
    /// Restarts the check for all readable memory whose sharing state is unknown.
    pub fn start(&mut self, table: &MemoryTable, client_takes_requests: bool) {
        self.samples.clear();
        for region in table.regions().iter().filter(|region| region.readable) {
            let Some(mapping) = region.mapping.as_ref().filter(|mapping| mapping.sharing() == Sharing::Unknown) else {
                continue;
            };
            if !client_takes_requests {
                if mapping.blocks() == Ok(0) {
                    self.found.push((region.gpa, Arc::clone(mapping)));
                }
                continue;
            }
            let last = region.size.saturating_sub(PAGE_SIZE);
            let parts =
                (1..PARTS).map(|part| (region.size / PARTS).saturating_mul(part) & !(PAGE_SIZE.saturating_sub(1)));
            let likely =
                EARLY_WRITE_ADDRS.iter().filter_map(|gpa| gpa.checked_sub(region.gpa)).filter(|&offset| offset <= last);
            for offset in likely.chain([last]).chain(parts) {
                if self.samples.len() < MAX_SAMPLES {
                    let (gpa, mapping) = (region.gpa.saturating_add(offset), Arc::clone(mapping));
                    self.samples.push_back(Sample { gpa, offset, mapping, struck: false });
                }
            }
        }
    }

    /// Continues the check with the received replies. Returns the private memory found: a guest physical address backed
    /// by each file, and the number of bytes that the file occupies.
    pub fn step(&mut self, link: &Link) -> Vec<(u64, u64)> {
        let mut private = std::mem::take(&mut self.found);
        loop {
            if let Some((pending, sample)) = self.running.take() {
                let Some(outcome) = pending.poll() else {
                    self.running = Some((pending, sample));
                    break;
                };
                match outcome {
                    Ok(theirs) => private.extend(self.compare(&theirs, sample)),
                    Err(DmaError::Refused { errno: ENODEV, .. } | DmaError::NotConnected | DmaError::Unsupported) => {
                        // The guest has disabled bus mastering again, or the client is gone. The next time that a guest
                        // enables bus mastering, another check starts.
                        self.samples.clear();
                    }
                    Err(_) => (),
                }
            }
            let Some(sample) = self.samples.pop_front() else { break };
            if sample.mapping.sharing() != Sharing::Unknown {
                continue;
            }
            match link.dma().read(sample.gpa, SAMPLE) {
                Ok(pending) => self.running = Some((pending, sample)),
                Err(_) => self.samples.clear(),
            }
        }
        let mut report = Vec::new();
        for (gpa, mapping) in private {
            if mapping.sharing() != Sharing::Private {
                mapping.set_sharing(Sharing::Private);
                report.push((gpa, mapping.blocks().unwrap_or(0).saturating_mul(512)));
            }
        }
        report
    }

    /// Evaluates one sample. Returns the memory if it is private.
    fn compare(&mut self, theirs: &[u8], mut sample: Sample) -> Option<(u64, Arc<Mapping>)> {
        let empty = |page: &[u8]| page.iter().all(|&byte| byte == 0);
        if empty(theirs) {
            return None;
        }
        let mut ours = [0u8; SAMPLE];
        let read = sample.mapping.peek(sample.offset, &mut ours).ok()?;
        if read != theirs.len() {
            return None;
        }
        if !empty(&ours) {
            if ours == theirs {
                sample.mapping.set_sharing(Sharing::Shared);
            }
            return None;
        }
        if sample.struck {
            return Some((sample.gpa, sample.mapping));
        }
        sample.struck = true;
        self.samples.push_front(sample);
        None
    }
}
