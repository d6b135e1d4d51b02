//! Measures the planning time for 64 VMs with 4096 chunks each, on a card with space for a quarter of these chunks.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use vram::balance::{By, Config, Request};
use vram::victim::VictimPolicy;
use vram::{Balancer, CHUNK_BYTES_MIN, ChunkTable, Contents, GuestVramAddr, Limits, TenantId};

const VMS: u32 = 64;
const CHUNKS: u32 = 4096;

/// Creates a chunk table in which each VM uses all but 8 of its chunks. If `fair` is true, the VMs have equal parts of
/// the card. Otherwise, the first VMs occupy the whole card.
fn table(fair: bool) -> ChunkTable {
    let card = VMS * CHUNKS / 4;
    let bytes = |chunks: u32| u64::from(chunks) * CHUNK_BYTES_MIN;
    let mut table = ChunkTable::new(bytes(card), CHUNK_BYTES_MIN, Contents::Zeroed).expect("the sizes are valid");
    table.set_host_budget(VMS * CHUNKS);
    for vm in 0..VMS {
        table.create_vm(TenantId(vm), bytes(CHUNKS + 8), Limits::default()).expect("the VM fits");
    }
    let mut place = |vm, index| table.place(TenantId(vm), GuestVramAddr(bytes(index))).expect("a chunk is free");
    if fair {
        (0..CHUNKS).for_each(|index| (0..VMS).for_each(|vm| _ = place(vm, index)));
    } else {
        (0..VMS).for_each(|vm| (0..CHUNKS).for_each(|index| _ = place(vm, index)));
    }
    table
}

fn plans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    let (fair, unfair) = (table(true), table(false));
    let request = |vm| Some(Request { by: By::Vm(TenantId(vm)), chunks: 1 });
    for policy in VictimPolicy::ALL {
        let config = Config { policy, idle_after_ns: u64::MAX, ..Config::default() };
        let cases = [
            ("rest", &fair, None),
            ("request-own", &fair, request(0)),
            ("request-evicts", &unfair, request(VMS - 1)),
            ("exchange-128", &unfair, None),
        ];
        for (name, table, request) in cases {
            let (mut balancer, mut now) = (Balancer::new(config), 0);
            (0..VMS).for_each(|vm| balancer.active(TenantId(vm), 0));
            group.bench_function(format!("{name}/{policy}"), |bench| {
                bench.iter(|| {
                    now += config.settle_ns;
                    black_box(balancer.plan(table, now, request))
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
