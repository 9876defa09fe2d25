use crate::bell::Bell;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Far longer than anything here takes, unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn who_waits_looks_when_it_rang_and_not_before() {
    let bell = Bell::default();
    let (looked, looks) = channel();
    let (happens, happened) = channel::<u32>();
    std::thread::scope(|s| {
        let listener = &bell;
        let waiting = s.spawn(move || {
            listener.wait(LIMIT, Duration::ZERO, || {
                looked.send(()).unwrap();
                happened.try_recv().ok()
            })
        });
        looks.recv().unwrap();
        // Something else.
        bell.ring();
        looks.recv().unwrap();
        happens.send(7).unwrap();
        bell.ring();
        assert_eq!(waiting.join().unwrap(), Some(7));
    });
    assert!(looks.try_iter().count() <= 1, "nobody looks without a ring");
}

#[test]
fn what_does_not_happen_is_not_waited_for_for_ever() {
    let bell = Bell::default();
    let waited = bell.wait(Duration::from_millis(1), Duration::ZERO, || None::<()>);
    assert_eq!(waited, None);
}
