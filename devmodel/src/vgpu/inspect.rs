//! Formats the state of a vGPU as text.

use super::VGpu;

impl VGpu {
    /// Returns the state as pairs of a name and a value.
    #[must_use]
    pub fn inspect(&self) -> Vec<(&'static str, String)> {
        let Self {
            config,
            pci,
            storage,
            denials,
            interrupts,
            pmc,
            pbus,
            pfifo,
            pbdma,
            ptimer,
            pmu: _,
            copy: _,
            graph,
            beside,
        } = self;
        let [window, bar1, bar3] = pbus.registers();
        let (shown, waiting, dropped) = pfifo.faults();
        let (hang, hangs_waiting, hangs_dropped) = pfifo.hangs();
        let hang = hang
            .map_or_else(|| "none".to_owned(), |(engine, channel)| format!("engine {engine}, channel {}", channel.0));
        vec![
            ("chip", config.chip.name.to_owned()),
            ("vram_mib", config.vram_mib().to_string()),
            ("bus_master", pci.bus_master().to_string()),
            ("msi", pci.msi_enabled().to_string()),
            ("msi_armed", interrupts.armed().to_string()),
            ("msi_messages", interrupts.messages.to_string()),
            ("intx_level", interrupts.intx().to_string()),
            ("intx_rises", interrupts.intx_rises.to_string()),
            ("interrupts_pending", format!("{:#010x}", self.pending())),
            ("units_enabled", format!("{:#010x}", pmc.enable())),
            ("pramin_window", format!("{window:#010x}")),
            ("bar1_block", format!("{bar1:#010x}")),
            ("bar3_block", format!("{bar3:#010x}")),
            ("channels_bound", pfifo.bound().to_string()),
            ("channels_enabled", pfifo.enabled().to_string()),
            ("channels_limit", config.channels.to_string()),
            ("runlist_pending", pfifo.runlist_pending().to_string()),
            ("mmu_faults_shown", shown.to_string()),
            ("mmu_faults_waiting", waiting.to_string()),
            ("mmu_faults_dropped", dropped.to_string()),
            ("hang_shown", hang),
            ("hangs_waiting", hangs_waiting.to_string()),
            ("hangs_dropped", hangs_dropped.to_string()),
            ("pbdma_interrupts", format!("{:#x}", pbdma.pending())),
            ("alarm_at_ns", ptimer.alarm_at().map_or_else(|| "none".to_owned(), |at| at.to_string())),
            ("interrupt_beside", beside.to_string()),
            ("graph_firmware", graph.firmware_running().to_string()),
            ("graph_context", format!("{:#010x}", graph.current())),
            ("register_pages", storage.pages_in_use().to_string()),
            ("denied_accesses", denials.total().to_string()),
        ]
    }
}
