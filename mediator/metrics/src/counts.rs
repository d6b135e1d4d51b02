//! Counters of a virtual machine's device and of its VMM connection. Each unit has its own metric family, because
//! samples with different units can be neither summed nor plotted together.

use std::collections::BTreeMap;

use super::scheduler::Seconds;
use super::{Metric, escaped};
use api::Vm;

/// Names of counts that can decrease.
const GAUGES: [&str; 9] = [
    "address_spaces",
    "aperture_pages",
    "dma_bytes",
    "dma_regions",
    "dma_regions_mapped",
    "pv_attachments",
    "pv_table_bytes",
    "pv_tables",
    "shadow_bytes",
];

/// Unit of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Number,
    Bytes,
    Seconds,
}

fn unit(name: &str) -> Unit {
    match () {
        () if name.ends_with("_ns") => Unit::Seconds,
        () if name.split('_').any(|word| word == "bytes") => Unit::Bytes,
        () => Unit::Number,
    }
}

/// Metric families of a virtual machine's counts.
pub(super) const VM: [Metric<Vm, String>; 10] = [
    ("gpu_mediator_vm_device_total", "counter", "Counters of a VM's device, by `count`", |vm| {
        of(&vm.counters, Unit::Number, false)
    }),
    ("gpu_mediator_vm_device_bytes_total", "counter", "Byte counters of a VM's device, by `count`", |vm| {
        of(&vm.counters, Unit::Bytes, false)
    }),
    ("gpu_mediator_vm_device_seconds_total", "counter", "Time counters of a VM's device, by `count`", |vm| {
        of(&vm.counters, Unit::Seconds, false)
    }),
    ("gpu_mediator_vm_device", "gauge", "Current values of a VM's device, by `count`", |vm| {
        of(&vm.counters, Unit::Number, true)
    }),
    ("gpu_mediator_vm_device_bytes", "gauge", "Current sizes of a VM's device, by `count`", |vm| {
        of(&vm.counters, Unit::Bytes, true)
    }),
    ("gpu_mediator_vm_transport_total", "counter", "Counters of the connection to a VM's VMM, by `count`", |vm| {
        of(&vm.transport, Unit::Number, false)
    }),
    (
        "gpu_mediator_vm_transport_bytes_total",
        "counter",
        "Byte counters of the connection to a VM's VMM, by `count`",
        |vm| of(&vm.transport, Unit::Bytes, false),
    ),
    (
        "gpu_mediator_vm_transport_seconds_total",
        "counter",
        "Time counters of the connection to a VM's VMM, by `count`",
        |vm| of(&vm.transport, Unit::Seconds, false),
    ),
    ("gpu_mediator_vm_transport", "gauge", "Current values of the connection to a VM's VMM, by `count`", |vm| {
        of(&vm.transport, Unit::Number, true)
    }),
    ("gpu_mediator_vm_transport_bytes", "gauge", "Current sizes of the connection to a VM's VMM, by `count`", |vm| {
        of(&vm.transport, Unit::Bytes, true)
    }),
];

/// Returns the samples of the counts with this unit: the gauges if `gauge` is true, or all others.
fn of(counts: &BTreeMap<String, u64>, wanted: Unit, gauge: bool) -> Vec<(String, String)> {
    let counts = counts.iter().filter(|(name, _)| unit(name) == wanted && GAUGES.contains(&name.as_str()) == gauge);
    let shown = |value: u64| if wanted == Unit::Seconds { Seconds(value).to_string() } else { value.to_string() };
    counts.map(|(name, &value)| (format!("count=\"{}\"", escaped(name)), shown(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_is_in_the_family_of_its_unit() {
        let names = ["doorbells", "memory_waited_ns", "shadow_bytes_scanned", "shadow_bytes", "address_spaces"];
        let counts: BTreeMap<String, u64> = names.map(|name| (name.to_owned(), 1_500_000_000)).into();
        let shown = |unit, gauge| of(&counts, unit, gauge).into_iter().map(|(label, value)| label + " " + &value);
        let families = [(Unit::Number, false), (Unit::Bytes, false), (Unit::Seconds, false), (Unit::Number, true)];
        let found: Vec<String> =
            families.into_iter().chain([(Unit::Bytes, true)]).flat_map(|(unit, gauge)| shown(unit, gauge)).collect();
        let expected = [
            "count=\"doorbells\" 1500000000",
            "count=\"shadow_bytes_scanned\" 1500000000",
            "count=\"memory_waited_ns\" 1.5",
            "count=\"address_spaces\" 1500000000",
            "count=\"shadow_bytes\" 1500000000",
        ];
        assert_eq!(found, expected);
    }
}
