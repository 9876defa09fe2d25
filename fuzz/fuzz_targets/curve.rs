//! Any bytes as a kept curve: gone on with or refused, and what is gone on with can be asked and kept again.
#![no_main]

use std::sync::LazyLock;

use hearth_observe::{KEPT_MAX, KeptOf, Observer};
use libfuzzer_sys::fuzz_target;

static OBSERVER: LazyLock<Observer> = LazyLock::new(|| Observer::start().expect("a thread"));
const OF: KeptOf = KeptOf {
    serial: *b"0123456789abcdef",
    size: 1 << 30,
};

fuzz_target!(|data: &[u8]| {
    let Some((how, rest)) = data.split_first() else {
        return;
    };
    let mut bytes = rest.to_vec();
    // With head and sum put right, which nobody guesses.
    if how % 2 == 0 {
        let mut head = b"HearthC\x01".to_vec();
        head.extend((rest.len() as u32 + 40).to_le_bytes());
        head.extend(OF.serial);
        head.extend(OF.size.to_le_bytes());
        head.extend(rest);
        head.extend(hearth_io::checksum::crc32c(&head).to_le_bytes());
        bytes = head;
    }
    let observer = &*OBSERVER;
    observer.watch_disk(1, OF.size);
    if observer.recall(1, &OF, &bytes).is_ok() {
        assert!(bytes.len() <= KEPT_MAX);
        let curve = observer.curve(1).expect("a curve");
        for points in [&curve.points, &curve.lru] {
            assert!(points.iter().all(|p| (0.0..=1.0).contains(&p.1)));
        }
        let (_, again) = observer.keep(1, &OF, u64::MAX).expect("it is kept again");
        assert!(again.len() <= KEPT_MAX);
        observer.forget_disk(1);
        observer.watch_disk(1, OF.size);
        // Counts beyond all measure add up to more than is taken.
        let _ = observer.recall(1, &OF, &again);
    }
    observer.forget_disk(1);
});
