// Scratch memory and threads. Failures come back as codes: nothing is thrown across the C interface.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

// Large blocks are kept for the next call: fresh pages from the system cost as much as the work on them.
class Pool {
 public:
  static void* take(size_t bytes) {
    Pool& pool = instance();
    if (bytes >= LARGE) {
      std::lock_guard<std::mutex> lock(pool.mutex);
      size_t best = pool.blocks.size();
      for (size_t i = 0; i < pool.blocks.size(); i++)
        if (pool.blocks[i].bytes >= bytes && pool.blocks[i].bytes <= 2 * bytes &&
            (best == pool.blocks.size() || pool.blocks[i].bytes < pool.blocks[best].bytes))
          best = i;
      if (best < pool.blocks.size()) {
        void* data = pool.blocks[best].data;
        pool.kept -= pool.blocks[best].bytes;
        pool.blocks.erase(pool.blocks.begin() + best);
        return data;
      }
    }
    void* data = std::aligned_alloc(64, bytes);
    if (!data) throw std::bad_alloc();
    return data;
  }
  static void give(void* data, size_t bytes) {
    Pool& pool = instance();
    if (bytes >= LARGE) {
      std::lock_guard<std::mutex> lock(pool.mutex);
      if (pool.kept + bytes <= MOST) {
        pool.blocks.push_back({data, bytes});
        pool.kept += bytes;
        return;
      }
    }
    std::free(data);
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  static constexpr size_t LARGE = 1 << 18, MOST = 256 << 20;
  std::mutex mutex;
  std::vector<Block> blocks;
  size_t kept = 0;
  static Pool& instance() {  // never destroyed: threads may still run when the process ends
    static Pool* pool = new Pool;
    return *pool;
  }
};

template <class T>
struct Buffer {  // cache-line aligned scratch memory
  T* data;
  size_t bytes;
  explicit Buffer(size_t count) : bytes((count * sizeof(T) + 127) / 64 * 64) { data = static_cast<T*>(Pool::take(bytes)); }
  ~Buffer() { Pool::give(data, bytes); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

// Calls make() once a thread and the result with every task number; the first failure ends all.
template <class Make>
int parallel(int64_t tasks, int64_t threads, Make make) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failure{0};
  auto loop = [&]() {
    try {
      auto work = make();
      for (int64_t task; !failure && (task = next++) < tasks;) work(task);
    } catch (const std::bad_alloc&) {
      failure = 1;
    } catch (...) {
      failure = 2;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads && i < tasks; i++) others.emplace_back(loop);
  } catch (...) {  // no more threads to be had: those that started do the work
  }
  loop();
  for (auto& other : others) other.join();
  return failure;
}

template <class Run>
int guarded(Run run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (...) {
    return 2;
  }
}

}  // namespace
