//! The table against a naive model.

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
    fn table_holds_what_a_map_of_pages_holds(steps in prop::collection::vec(step(), 0..60)) {
        let memory = GuestMemory::default();
        let wake = Arc::new(Wake::new().unwrap());
        let limits = MemoryLimits { regions: 12, ..Default::default() };
        // Of each page: the region that holds it.
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
fn nothing_lies_outside_of_all_regions() {
    let table = MemoryTable::default();
    assert!(table.find(0).is_none());
    assert!(table.find(u64::MAX).is_none());
    assert_eq!(table.read(0, &mut []), Ok(()));
}
