//! What was made of swap on this host, by the notes of who made it.

use std::path::Path;

use hearth_swap::Areas;

use crate::api::swap::{SwapArea, SwapInfo, SwapSetting};
use crate::error::Result;

/// As the notes in `state_dir` and the kernel say.
pub(super) fn info(state_dir: &Path) -> Result<SwapInfo> {
    let areas = Areas::open(state_dir)?;
    let settings = areas.settings().iter().map(|set| SwapSetting {
        path: set.path.display().to_string(),
        before: set.before.clone(),
        now: set.now.clone(),
        why: set.why.clone(),
    });
    let shown = areas.show()?.into_iter().map(|area| SwapArea {
        path: area.noted.path.display().to_string(),
        size: area.noted.size,
        used: area.used,
        priority: area.noted.priority,
        on: area.on,
    });
    Ok(SwapInfo {
        areas: shown.collect(),
        settings: settings.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_told_as_they_are_noted() {
        let tmp = tempfile::tempdir().unwrap();
        assert_eq!(info(tmp.path()).unwrap(), SwapInfo::default());
        let host = hearth_swap::notes::this_host();
        let text = format!(
            r#"{{"version":1,"host":{host:?},"areas":[{{"path":"/none/flash.swap","size":8388608,
            "uuid":"67e55044-10b1-426f-9247-bb680e5fe0c8","priority":100,"discard":"off","stage":"used"}}],
            "settings":[{{"path":"/proc/sys/vm/page-cluster","before":"3","now":"0","why":"flash"}}]}}"#
        );
        std::fs::write(tmp.path().join("swap.json"), text).unwrap();
        let told = info(tmp.path()).unwrap();
        assert_eq!(told.areas.len(), 1);
        let area = &told.areas[0];
        assert_eq!((area.size, area.used, area.priority), (8 << 20, 0, 100));
        assert!(!area.on, "the kernel knows no such file");
        assert_eq!(told.settings[0].before, "3");
        std::fs::write(tmp.path().join("swap.json"), "{}").unwrap();
        let wrong = info(tmp.path()).unwrap_err();
        assert!(wrong.what.contains("swap.json"), "{wrong}");
    }
}
