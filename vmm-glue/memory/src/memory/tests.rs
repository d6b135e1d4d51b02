//! Compares the table with a simple model.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Add { page: u64, pages: u64 },
    Remove { page: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u64..64, 0u64..8).prop_map(|(page, pages)| Step::Add { page, pages }),
        1 => (0u64..64).prop_map(|page| Step::Remove { page }),
    ]
}

proptest! {
    #[test]
    fn table_agrees_with_page_map_model(steps in prop::collection::vec(step(), 0..60)) {
        let memory = GuestMemory::default();
        let wake = Arc::new(Wake::new().unwrap());
        let limits = MemoryLimits { regions: 12, ..Default::default() };
        // Start of the region that contains each page.
        let mut pages: Vec<Option<u64>> = vec![None; 80];
        for step in steps {
            match step {
                Step::Add { page, pages: count } => {
                    let range = page as usize..(page + count) as usize;
                    let starts: std::collections::BTreeSet<_> = pages.iter().flatten().collect();
                    let free = pages[range.clone()].iter().all(Option::is_none);
                    let possible = count != 0 && free && starts.len() < limits.regions;
                    let (gpa, size) = (page * PAGE_SIZE, count * PAGE_SIZE);
                    let request = AddRegion { gpa, size, offset: 0, readable: true, writable: true, fd: None };
                    prop_assert_eq!(memory.add(request, &limits, &wake).is_ok(), possible);
                    if possible {
                        pages[range].fill(Some(gpa));
                    }
                }
                Step::Remove { page } => {
                    let gpa = page * PAGE_SIZE;
                    let there = pages.contains(&Some(gpa));
                    prop_assert_eq!(memory.remove(gpa).is_some(), there);
                    pages.iter_mut().filter(|place| **place == Some(gpa)).for_each(|place| *place = None);
                }
            }
            let table = memory.snapshot();
            for (page, region) in (0u64..).zip(&pages) {
                for gpa in [page * PAGE_SIZE, page * PAGE_SIZE + PAGE_SIZE - 1] {
                    prop_assert_eq!(table.find(gpa).map(|found| found.gpa), *region);
                }
            }
            prop_assert!(table.regions().is_sorted_by(|a, b| a.end() <= b.gpa));
            for (from, last) in [(0, u64::MAX), (3 * PAGE_SIZE, 40 * PAGE_SIZE), (5 * PAGE_SIZE, 5 * PAGE_SIZE - 1)] {
                let within = table.regions().iter().filter(|region| from <= region.gpa && region.gpa <= last);
                prop_assert!(within.map(|region| region.gpa).eq(table.starting_in(from, last).iter().map(|region| region.gpa)));
            }
        }
    }
}

#[test]
fn empty_table_finds_no_region() {
    let table = MemoryTable::default();
    assert!(table.find(0).is_none());
    assert!(table.find(u64::MAX).is_none());
    assert_eq!(table.read(0, &mut []), Ok(()));
}

fn file(pages: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest-memory", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE_SIZE).unwrap();
    fd
}

/// Returns a request to map page `page` of a file.
fn lent(gpa: u64, fd: &OwnedFd, page: u64) -> AddRegion {
    let (size, offset, fd) = (PAGE_SIZE, page * PAGE_SIZE, Some(fd.try_clone().unwrap()));
    AddRegion { gpa, size, offset, readable: true, writable: true, fd }
}

#[test]
fn files_are_bounded_and_parts_of_one_count_once() {
    let memory = GuestMemory::default();
    let wake = Arc::new(Wake::new().unwrap());
    let limits = MemoryLimits { files: 2, ..Default::default() };
    let add = |gpa: u64, fd: &OwnedFd, page| memory.add(lent(gpa * PAGE_SIZE, fd, page), &limits, &wake).map(drop);
    let files = [file(4), file(4), file(4)];
    for (gpa, (fd, page)) in (0..).zip([(&files[0], 0), (&files[1], 0), (&files[0], 1), (&files[1], 3)]) {
        add(gpa, fd, page).unwrap();
    }
    assert!(matches!(add(9, &files[2], 0), Err(AddError::TooManyFiles(2))));
    // Memory without a file needs no descriptor.
    let none = AddRegion { gpa: 9 * PAGE_SIZE, size: PAGE_SIZE, offset: 0, readable: true, writable: true, fd: None };
    memory.add(none, &limits, &wake).unwrap();
    // Removing the last mapped part of a file releases the file.
    memory.remove(PAGE_SIZE);
    assert!(add(10, &files[2], 0).is_err());
    memory.remove(3 * PAGE_SIZE);
    add(10, &files[2], 0).unwrap();
    assert_eq!(memory.snapshot().regions().len(), 4);
}

#[test]
fn unmappable_memory_is_withdrawn_on_restore_and_rest_is_kept() {
    let wake = Arc::new(Wake::new().unwrap());
    let memory = GuestMemory::default();
    let limits = MemoryLimits::default();
    let [good, cut, sealed] = [file(1), file(1), file(1)];
    for (gpa, fd) in (0..).zip([&good, &cut, &sealed]) {
        memory.add(lent(gpa * PAGE_SIZE, fd, 0), &limits, &wake).unwrap();
    }
    memory.write(0, &[7; 4]).unwrap();
    let mut giving = crate::descriptors::Giving::Over(Vec::new());
    let saved = memory.save(&mut giving).unwrap();
    rustix::fs::ftruncate(&cut, 0).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
    let given = crate::descriptors::Given::all(giving.over());
    let next = GuestMemory::default();
    let before = withdrawals();
    // Mapped memory stays valid when the limits are lowered.
    let fewer = MemoryLimits { files: 1, ..limits };
    next.restore(saved, &given, &fewer, &wake).unwrap();
    assert!(withdrawals() >= before + 2, "the server checks for it");
    let mut data = [0; 4];
    next.read(0, &mut data).unwrap();
    assert_eq!(data, [7; 4]);
    for gpa in [PAGE_SIZE, 2 * PAGE_SIZE] {
        assert_eq!(next.read(gpa, &mut data), Err(MemoryError::Withdrawn { gpa }));
    }
    let withdrawn: Vec<bool> = next.snapshot().regions().iter().map(DmaRegion::is_withdrawn).collect();
    assert_eq!(withdrawn, [false, true, true]);
}
